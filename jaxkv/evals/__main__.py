"""The harness's command line, in which `--model jaxkv` is known."""

from lm_eval.__main__ import cli_evaluate

import jaxkv.evals.model  # noqa: F401  (registers the model)

if __name__ == "__main__":
    cli_evaluate()
