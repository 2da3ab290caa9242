"""Words and pieces of words: Moses' tokens and joint BPE for translation, sentencepiece for classification."""

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

import sentencepiece
from joblib import Parallel, cpu_count, delayed
from subword_nmt.apply_bpe import BPE  # type: ignore[import-untyped]
from subword_nmt.learn_bpe import learn_bpe  # type: ignore[import-untyped]

from ..errors import RunError
from ..progress import tracked
from .moses import tokenize
from .text import Columns, Dropped, Made, Stages, empty_side, keep

_CHUNK = 2_000
_LINES_PER_PROCESS = 20_000
#: Symbols that every dictionary of fairseq begins with: <s>, <pad>, </s>, <unk>.
FAIRSEQ_SYMBOLS = 4


def tools(*names: str) -> dict[str, str]:
    """Versions of packages that decide what becomes of a text."""
    return {name: version(name) for name in names}


def moses_tokens(lines: Sequence[str], language: str, stages: Stages, jobs: int | None = None) -> list[str]:
    """Lines in the tokens of Moses' tokenizer (sacremoses), special characters escaped as it does.

    Args:
        lines: one sentence each.
        language: "de", "en", ...
        stages: whose console shows the progress.
        jobs: processes, None for one per core.
    """
    chunks = [lines[start : start + _CHUNK] for start in range(0, len(lines), _CHUNK)]
    # Few lines are done before another process would have started.
    processes = min(jobs or cpu_count(), 1 + len(lines) // _LINES_PER_PROCESS)
    work = Parallel(n_jobs=processes, return_as="generator")(delayed(tokenize)(chunk, language) for chunk in chunks)
    shown = tracked(work, f"tokens of {len(lines):,} lines ({language})", len(chunks), console=stages.console)
    return [line for chunk in shown for line in chunk]


def lower_tokens(
    parts: dict[str, Columns],
    languages: Sequence[str],
    stages: Stages,
    jobs: int | None = None,
    unfit: Callable[[dict[str, str]], str | None] = empty_side,
    apply_to: Sequence[str] = (),
) -> Made:
    """Moses' tokens in lower case; other columns stay as they are.

    Args:
        parts: with a column for each language.
        languages: whose columns are split into tokens.
        stages: whose console shows the progress.
        jobs: processes, None for one per core.
        unfit: tells by the tokens, before they are put into lower case, why a row is left out.
        apply_to: the parts that `unfit` is asked about; of the others only rows with an empty side are left out.
    """
    dropped = Dropped()
    made = {}
    for part, columns in parts.items():
        tokens = columns | {language: moses_tokens(columns[language], language, stages, jobs) for language in languages}
        rows = keep(tokens, unfit if part in apply_to else empty_side, dropped, part)
        made[part] = rows | {language: [line.lower() for line in rows[language]] for language in languages}
    return Made(made, {"dropped": dropped.facts()})


def joint_bpe(parts: dict[str, Columns], languages: Sequence[str], merges: int, stages: Stages) -> Made:
    """Byte-pair encoding (Sennrich et al., ACL 2016) learned on `parts["train"]`, applied to all parts.

    Returns:
        the parts in pieces, and the merges as the file `codes`.

    Raises:
        RunError: where nothing repeats in the training text, so that there is nothing to merge.
    """
    codes = io.StringIO()
    progress: contextlib.AbstractContextManager[object] = (
        contextlib.nullcontext() if stages.console.is_terminal else contextlib.redirect_stderr(io.StringIO())
    )
    # The progress of subword-nmt goes to stderr, and is for terminals.
    words = {word for language in languages for line in parts["train"][language] for word in line.split()}
    # Without two characters in one word subword-nmt fails, and without a merge it ends the process.
    if any(len(word) > 1 for word in words):
        with progress:
            learn_bpe([line for language in languages for line in parts["train"][language]], codes, merges)
    content = codes.getvalue()
    found = max(0, content.count("\n") - 1)
    if not found:
        raise RunError("no two characters stand together twice in the training text: it is too small for BPE")
    segment = BPE(codes)
    pieces = {
        part: {
            language: [
                segment.process_line(line)
                for line in tracked(columns[language], f"pieces of {part}.{language}", console=stages.console)
            ]
            for language in languages
        }
        for part, columns in parts.items()
    }
    return Made(pieces, {"merges": found}, {"codes": content.encode()})


def train_pieces(lines: Iterable[str], size: int, lower_case: bool) -> bytes:
    """A sentencepiece BPE model whose dictionary in fairseq has exactly `size` entries, its four symbols included.

    Args:
        lines: training text alone.
        size: of the dictionary.
        lower_case: folds the case of all text.

    Raises:
        RunError: where the text has too few different pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            # sentencepiece's own <unk> is in its count, fairseq's four symbols are in ours.
            vocab_size=size - FAIRSEQ_SYMBOLS + 1,
            bos_id=-1,
            eos_id=-1,
            character_coverage=1.0,
            normalization_rule_name="nmt_nfkc_cf" if lower_case else "nmt_nfkc",
            # Longer lines would be left out without a word; a review has up to 14,000 characters.
            max_sentence_length=1 << 24,
            # One thread: the same text gives the same pieces on every machine.
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RunError(f"a vocabulary of {size:,} pieces could not be made of the training text: {reason}") from error
    return model.getvalue()


def pieces(parts: dict[str, Columns], size: int, lower_case: bool, stages: Stages) -> Made:
    """Splits as fairseq's `sentence_prediction` wants them: the text in pieces as `input0`, and `label`.

    Args:
        parts: the splits, with the columns `text`, `label` and `id`.
        size: of the dictionary.
        lower_case: folds the case.
        stages: whose console shows the progress.

    Returns:
        the splits; as files the model and the dictionary, with the number of times each piece occurs in training.
    """
    stages.console.print(f"learning {size:,} pieces of {len(parts['train']['text']):,} lines", highlight=False)
    model = train_pieces(parts["train"]["text"], size, lower_case)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    made: dict[str, Columns] = {}
    dropped = Dropped()
    for part, columns in parts.items():
        shown = tracked(columns["text"], f"pieces of {part}", console=stages.console)
        encoded = [" ".join(processor.Encode(line, out_type=str)) for line in shown]
        # A line of invisible characters alone has no pieces.
        made[part] = keep(
            {"input0": encoded, "label": columns["label"], "id": columns["id"]}, empty_side, dropped, part
        )
    counts = dict.fromkeys((processor.IdToPiece(i) for i in range(1, processor.GetPieceSize())), 0)
    unknown: dict[str, int] = {}
    for part, columns in made.items():
        unknown[part] = 0
        for line in columns["input0"]:
            for piece in line.split(" "):
                if piece not in counts:
                    unknown[part] += 1
                elif part == "train":
                    counts[piece] += 1
    dictionary = "".join(f"{piece} {count}\n" for piece, count in counts.items())
    facts = {"dictionary": len(counts) + FAIRSEQ_SYMBOLS, "unknown_pieces": unknown, "dropped": dropped.facts()}
    return Made(made, facts, {"sentencepiece.model": model, "dict.input0.txt": dictionary.encode()})
