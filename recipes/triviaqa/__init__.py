"""TriviaQA: answers to questions as spans of long documents (FLASH, Table 4)."""
