"""What ``prepare`` made, kept: samples as leaves, the store, and where it lies."""
