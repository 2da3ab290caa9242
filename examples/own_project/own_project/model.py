"""A small encoder over the rows of an image."""

from torch import Tensor, nn


class Rows(nn.Module):
    """Each row is a token; its attention is the suite's to convert.

    Args:
        num_classes: number of logits.
        img_size: height and width, a multiple of 4.
        in_chans: channels.
        depth: layers.
    """

    def __init__(self, num_classes: int, img_size: int, in_chans: int, depth: int = 1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(img_size * in_chans, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(img_size * in_chans, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, height, width) to logits (B, num_classes)."""
        return self.head(self.encoder(images.transpose(1, 2).flatten(2)).mean(1))
