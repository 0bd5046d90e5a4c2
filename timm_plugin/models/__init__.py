"""Models, registered with timm."""
