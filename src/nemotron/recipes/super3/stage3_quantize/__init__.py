"""Stage 3: quantisation after training, and distillation into the quantised model."""
