"""Training: teachers, objectives, the optimiser and the visible loop. Trains any module that is a split denoiser."""
