"""Golden runs: short seeded runs whose parameters and optimizer state keep every bit from commit to commit.

`runs` says what is run, `script` is each trainer, `clusters` starts the processes and collects the digests, `record`
writes them to `digests.json`, and `sabotaged` breaks the arithmetic to show that digests notice.
"""
