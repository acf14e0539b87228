"""Step engines: how one step's gradients become new parameters, on pservers, in a ring, or through a host's leader."""
