"""What a KV cache is: formats, planning, tensors, block hashes, the prefix-cached block manager."""
