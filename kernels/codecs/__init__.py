"""Which bytes stand for which numbers? The formats of weights and cached tensors, bit for bit."""
