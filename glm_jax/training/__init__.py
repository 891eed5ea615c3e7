"""The backward of the one forward: recomputed from saved region inputs, in canonical order."""
