"""Our tasks in lm-eval as a harness of NeMo Evaluator 0.2, which finds it in the folder `core_evals` on PYTHONPATH."""
