"""Mixed precision: GradScalers that go the same way on all trainers."""
