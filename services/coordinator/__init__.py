"""The coordinator: who is here, the slice plan, and the cluster-wide inspection API. No tensor of a step passes it."""
