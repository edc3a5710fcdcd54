"""What `fsdfm bench` runs: every benchmark prints ratios measured in one interleaved run."""
