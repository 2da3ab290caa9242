"""Set Transformer and Set Sinkformer for point-cloud classification."""

from collections.abc import Mapping

from sinkhorn_attention.normalizers import NormalizerChoice, choose_normalizer
from torch import Tensor, nn
from torch_geometric.data import Data

from .batches import dense_clouds
from .blocks import ISAB, PMA, SAB, check_points, hide


class SetTransformer(nn.Module):
    """Classifies point clouds by set attention (Lee et al., Set Transformer; Sander et al., Sinkformers, section 5).

    Encoder of ISABs (or SABs), dropout, PMA, optionally SABs on the pooled vectors, dropout, linear head. The defaults
    are the published ModelNet40 configuration: 1,145,384 parameters with 40 classes.

    Pooling. With one seed (the published configuration), Sinkhorn pooling is exactly mean pooling from the third
    half-step on: see `PMA`. The published code pools by the same Sinkhorn attention as everywhere else, so its pooling
    is that mean for every n_iters >= 3; the paper's text makes no exception for the pooling either, as far as
    remembered (not yet checked against the PDF). `pool_normalizer="softmax"` keeps a learned pooling.

    Args:
        num_classes: number of logits.
        normalizer: of every attention in the encoder and after the pooling: a name, a mapping of "name" and options, or
            a Normalizer, see `sinkhorn_attention.get_normalizer`.
        n_iters: its number of half-steps; None leaves it to the normalizer (a normalizer without half-steps, like
            "softmax", takes None only).
        normalizer_options: further options of the normalizer.
        pool_normalizer: the pooling's normalizer, likewise; None for the same, with the same options.
        pool_normalizer_options: options of the pooling's normalizer where it is named.
        hidden: width of all blocks.
        num_heads: number of heads.
        num_inducing: inducing points per ISAB; 0 makes the encoder of SABs, whose maps are n × n.
        encoder_blocks: number of blocks before the pooling.
        decoder_blocks: number of SABs after it; 0 as published. With a single seed a SAB sees a single token.
        num_seeds: number of pooled vectors, concatenated for the head.
        dropout: before the pooling and before the head.
        norm: "post" (published), "pre" or "none": see `MAB`.
        scale: "width" (published), "head" or "none": see `MAB`.
        residual: "projected" (published) or "input": see `MAB`.
        row_mass: "one", or "uniform" as in the published code, whose attention nearly vanishes against the residual
            wherever there are many queries: see `MAB`.
        attn_dropout: dropout of the couplings' entries.
        features: of each point, beside its three coordinates.
    """

    def __init__(
        self,
        num_classes: int = 40,
        normalizer: NormalizerChoice = "sinkhorn",
        n_iters: int | None = None,
        normalizer_options: Mapping[str, object] | None = None,
        *,
        pool_normalizer: NormalizerChoice | None = None,
        pool_normalizer_options: Mapping[str, object] | None = None,
        hidden: int = 256,
        num_heads: int = 4,
        num_inducing: int = 16,
        encoder_blocks: int = 2,
        decoder_blocks: int = 0,
        num_seeds: int = 1,
        dropout: float = 0.5,
        norm: str = "post",
        scale: str = "width",
        residual: str = "projected",
        row_mass: str = "one",
        attn_dropout: float = 0.0,
        features: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("num_classes", num_classes, 1),
            ("encoder_blocks", encoder_blocks, 1),
            ("decoder_blocks", decoder_blocks, 0),
            ("num_inducing", num_inducing, 0),
            ("num_seeds", num_seeds, 1),
            ("features", features, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if pool_normalizer is None and pool_normalizer_options is not None:
            raise ValueError("pool_normalizer_options needs a pool_normalizer to belong to, got None")
        layout = {
            "norm": norm,
            "scale": scale,
            "residual": residual,
            "row_mass": row_mass,
            "attn_dropout": attn_dropout,
        }
        attention = {"normalizer": choose_normalizer(normalizer, n_iters, normalizer_options), **layout}
        pooling = attention
        if pool_normalizer is not None:
            pooling = {"normalizer": choose_normalizer(pool_normalizer, options=pool_normalizer_options), **layout}
        self.num_features = features
        widths = [3 + features] + [hidden] * (encoder_blocks - 1)
        self.encoder = nn.ModuleList(
            ISAB(width, hidden, num_heads, num_inducing, **attention)
            if num_inducing
            else SAB(width, hidden, num_heads, **attention)
            for width in widths
        )
        self.pool_dropout = nn.Dropout(dropout)
        self.pool = PMA(hidden, num_heads, num_seeds, **pooling)
        self.decoder = nn.ModuleList(SAB(hidden, hidden, num_heads, **attention) for _ in range(decoder_blocks))
        self.head_dropout = nn.Dropout(dropout)
        self.head = nn.Linear(num_seeds * hidden, num_classes)

    def features(self, points: Tensor | Data, mask: Tensor | None = None) -> Tensor:
        """Per-point features of the encoder, (B, n, hidden), 0 at masked points. Arguments as for `forward`."""
        points, mask = dense_clouds(points, mask)
        check_points(points, mask, self.num_features)
        x = hide(points, mask)
        for block in self.encoder:
            x = block(x, mask)
        return x

    def forward(self, points: Tensor | Data, mask: Tensor | None = None) -> Tensor:
        """Logits (B, num_classes) of clouds.

        Args:
            points: (B, n, 3 + features), floating; or torch_geometric's Data or Batch, see `dense_clouds`.
            mask: (B, n), boolean, True = a real point (as torch_geometric.utils.to_dense_batch gives it). A padded
                cloud's logits are those of the cloud alone. A cloud without any real point gives finite logits.

        Raises:
            ValueError: says which argument has the wrong shape or dtype.
        """
        points, mask = dense_clouds(points, mask)
        pooled = self.pool(self.pool_dropout(self.features(points, mask)), mask)
        for block in self.decoder:
            pooled = block(pooled)
        return self.head(self.head_dropout(pooled.flatten(1)))
