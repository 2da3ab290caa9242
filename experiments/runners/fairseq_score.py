"""Metrics of fairseq's checkpoints on a split, in a process of its own; `fairseq.score` makes the request."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.logging import metrics
from fairseq.scoring.bleu import BleuConfig, Scorer
from sacrebleu.metrics import BLEU

from ..files import check_sums
from .fairseq_events import FairseqError, emit, end_with_parent, explained, keep_digits, numbers, write_log
from .products import set_matmul_precision


class Scored:
    """A checkpoint's model and the task with the split's sentences."""

    def __init__(self, path: Path, request: dict[str, Any], device: torch.device) -> None:
        try:
            check_sums(path)
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        except Exception as error:  # whatever unpickling damaged bytes may raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise FairseqError(
                f"checkpoint {path} cannot be read: {reason}. Remove that run's folder and give its command again"
            ) from error
        self.step = state["optimizer_history"][-1]["num_updates"]
        # The criterion's own counts of BLEU are left to `translations`, which translates once for both.
        overrides = {"data": request["data"], "eval_bleu": False}
        models, self.cfg, self.task = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides, state=state)
        self.model = models[0].to(device).eval()
        self.request, self.device = request, device
        self.task.load_dataset(request["split"])

    def batches(self) -> Any:
        """The batches of the split, every sentence once."""
        positions = utils.resolve_max_positions(self.task.max_positions(), self.model.max_positions())
        iterator = self.task.get_batch_iterator(
            dataset=self.task.dataset(self.request["split"]),
            max_tokens=self.request["max_tokens"],
            max_sentences=self.request["batch_size"],
            max_positions=positions,
            ignore_invalid_inputs=False,
            required_batch_size_multiple=1,
            seed=1,
        ).next_epoch_itr(shuffle=False)
        return (utils.move_to_cuda(batch) if self.device.type == "cuda" else batch for batch in iterator)

    def losses(self) -> dict[str, float]:
        """What the criterion measures: the loss, and accuracy or the negative log-likelihood."""
        criterion = self.task.build_criterion(self.cfg.criterion).to(self.device).eval()
        with metrics.aggregate(new_root=True) as found, torch.no_grad():
            for batch in self.batches():
                _, _, output = self.task.valid_step(batch, self.model, criterion)
                self.task.reduce_metrics([output], criterion)
        return numbers(found.get_smoothed_values())

    def bleu(self) -> tuple[dict[str, float], str]:
        """BLEU by sacrebleu on detokenised text, fairseq's own on tokens, and sacrebleu's signature.

        fairseq's is that of `fairseq-generate --remove-bpe`: on the data's own tokens, from its own dictionary.
        """
        from sacremoses import MosesDetokenizer  # type: ignore[import-untyped]

        target = self.task.target_dictionary
        detokenizer = MosesDetokenizer(lang=self.cfg.task.target_lang)
        self.model.prepare_for_inference_(self.cfg)
        generator = self.task.build_generator([self.model], Namespace(**self.request["generation"]))
        own = Scorer(BleuConfig(pad=target.pad(), eos=target.eos(), unk=target.unk()))
        hypotheses: list[str] = []
        references: list[str] = []
        for batch in self.batches():
            found = self.task.inference_step(generator, [self.model], batch)
            for row, best in zip(batch["target"], found, strict=True):
                reference = utils.strip_pad(row, target.pad()).int().cpu()
                hypothesis = best[0]["tokens"].int().cpu()
                own.add(
                    target.encode_line(target.string(reference, "@@ ", escape_unk=True), add_if_not_exist=True),
                    target.encode_line(target.string(hypothesis, "@@ "), add_if_not_exist=True),
                )
                # As fairseq's task does it in validation: an unknown word of the reference is never matched.
                for tokens, lines, unknown in (
                    (reference, references, "UNKNOWNTOKENINREF"),
                    (hypothesis, hypotheses, "UNKNOWNTOKENINHYP"),
                ):
                    lines.append(detokenizer.detokenize(target.string(tokens, "@@ ", unk_string=unknown).split()))
        metric = BLEU()
        total = metric.corpus_score(hypotheses, [references]).score
        return {"bleu": total, "tokenized_bleu": own.score()}, str(metric.get_signature())


def _device(accelerator: str) -> torch.device:
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise FairseqError(f"trainer.accelerator={accelerator}: there is no GPU here")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def main() -> None:
    """Scores every checkpoint of the request and tells `scores`."""
    request = json.loads(sys.argv[1])
    end_with_parent()
    with explained():
        if request["threads"] is not None:
            torch.set_num_threads(request["threads"])
        utils.import_user_module(Namespace(user_dir=request["user_dir"]))
        write_log()
        keep_digits()
        torch.use_deterministic_algorithms(request["deterministic"], warn_only=True)
        device = _device(request["accelerator"])
        set_matmul_precision(device, request["matmul_precision"])
        made: dict[str, Any] = {}
        signature = None
        for number, path in request["checkpoints"].items():
            scored = Scored(Path(path), request, device)
            values = scored.losses()
            if request["generation"] is not None:
                more, signature = scored.bleu()
                values |= more
            made[number] = {"step": scored.step, "metrics": values}
    emit("scores", metrics=made, signature=signature)


if __name__ == "__main__":
    main()
