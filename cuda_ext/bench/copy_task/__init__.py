"""A copy task that shows a wrong recurrent state as wrong words: data, training, scoring.

    PYTHONPATH=. python -m cuda_ext.bench.copy_task.train MODEL --minutes 3
    PYTHONPATH=. python -m cuda_ext.bench.copy_task.score MODEL --out RESULT

Training needs a GPU and transformers 5.17; with fla-core on the path it runs through
flash-linear-attention's kernels, else through a chunked form in torch. Scoring needs vLLM.
"""
