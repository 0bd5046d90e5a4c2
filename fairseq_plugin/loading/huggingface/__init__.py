"""Reading other people's BERT, RoBERTa and GPT-2 from folders as Hugging Face writes them; no code in them is run.

Only files are read, so that transformers need not be installed.
"""

from .foreign_model import ForeignModel
from .read import MODEL_TYPES, read_foreign_model

__all__ = ["MODEL_TYPES", "ForeignModel", "read_foreign_model"]
