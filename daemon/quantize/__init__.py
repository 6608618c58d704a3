"""`deepinfer-daemon quantize`: a model in 16 bits, or a GGUF file, to a compressed-tensors folder of 4-bit weights."""
