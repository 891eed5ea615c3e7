"""`python -m pallas_kernels.indexer_scores.bench`: time of the index scores of GLM-5.2."""

from pallas_kernels.bench import main
from pallas_kernels.indexer_scores.shapes import OP

if __name__ == "__main__":
    main(OP)
