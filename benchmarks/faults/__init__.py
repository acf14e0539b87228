"""The cost of faults and of durability: `recovery`, `goodput` and `durability` each print a report."""
