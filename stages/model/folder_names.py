"""What the files of a Hugging Face folder are called."""

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""All weights in one file; or which shard holds which tensor."""
GPTQ_CONFIG, AWQ_CONFIG = "quantize_config.json", "quant_config.json"
"""Files beside config.json in which older AutoGPTQ and AutoAWQ said what is quantised."""
