"""The trainer's side of Gradpost. Training scripts import its public names from `gradpost`."""
