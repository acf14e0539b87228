"""The coordinator: members, the slice plan, and the cluster-wide inspection API. No tensor of a step passes it."""
