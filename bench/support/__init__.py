"""What benchmarks share: the one part of `bench` that tests of other rooms import."""
