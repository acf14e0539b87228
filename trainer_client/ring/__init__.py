"""Strategy ring: trainers add their gradients up among themselves, and each steps its own optimizer."""
