"""The command line of Gradpost; each command is a module of this package, imported only when it runs."""
