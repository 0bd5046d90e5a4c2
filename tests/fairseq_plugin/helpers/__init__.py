"""What tests of the fairseq plugin share: toy text and images, small models, commands, logs, checkpoints."""
