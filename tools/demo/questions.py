"""What the demo asks about its document, and the prompts that come of it.

The law of this module: the document stands before the question, so that prompts about one document
share a prefix. The handbook is of an observatory that doesn't exist: its facts can't have been
learned elsewhere, so a right answer was read in the document.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

__all__ = ["QUESTIONS", "document", "prompt"]

QUESTIONS = (
    "Who is the director of the observatory?",
    "What is the name of the cat?",
    "For how many days are the stores filled?",
)


def document() -> str:
    """The handbook, about 1,940 tokens of the demo's model."""
    return resources.files("kvd.tools.demo").joinpath("handbook.txt").read_text("utf-8")


def prompt(tokenizer: Any, question: str) -> Any:
    """Token ids [1, n] of the document and then the question, as the model's chat wants them."""
    message = {"role": "user", "content": f"{document()}\n\n{question}"}
    told = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return told["input_ids"]
