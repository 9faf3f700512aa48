"""lm-evaluation-harness over this runtime; `pip install 'jaxkv[evals]'`.

`python -m jaxkv.evals` is the harness's own command line with one model more:

    python -m jaxkv.evals run --model jaxkv --model_args pretrained=smollm2,max_len=2048 --tasks hellaswag
"""
