"""One decoding step as a program for ONNX Runtime and torch.export."""
