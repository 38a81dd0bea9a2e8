"""``ds-silent numerics``: how far reductions in fp32, bf16 and fp16 are from the float64 mean, and what follows."""
