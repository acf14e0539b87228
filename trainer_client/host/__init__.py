"""Several processes of one host as one trainer: they add gradients up among themselves, and process 0 joins the run."""
