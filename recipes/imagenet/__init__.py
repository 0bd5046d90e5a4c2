"""ImageNet-1K through timm's own scripts; see README.md."""
