"""What faults cost, and what it costs to survive them: `recovery`, `goodput` and `durability` each print a report."""
