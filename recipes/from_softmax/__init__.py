"""From a trained softmax Transformer to one in linear time: exchanged, transferred, distilled, and from scratch."""
