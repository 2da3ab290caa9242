"""Moses' tokens, in a module that a worker process loads in a moment."""

from collections.abc import Sequence

from sacremoses import MosesTokenizer  # type: ignore[import-untyped]


def tokenize(lines: Sequence[str], language: str) -> list[str]:
    """Each line as its tokens with a space between them, special characters escaped (`&amp;`) as Moses does."""
    tokenizer = MosesTokenizer(language)
    return [str(tokenizer.tokenize(line, return_str=True)) for line in lines]
