"""Speed measurements: one room for the clock, one for each thing measured."""
