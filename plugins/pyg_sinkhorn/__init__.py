"""Sinkhorn attention for point clouds: set attention blocks, Set Transformer, Point Cloud Transformer, neighbours."""

from .batches import dense_clouds
from .blocks import ISAB, MAB, PMA, SAB
from .conversion import convert
from .edge_sinkhorn import edge_sinkhorn
from .neighbors import farthest_point_sample, knn
from .normalizers import PCT
from .point_cloud_transformer import OffsetAttention, PointCloudTransformer, SampleAndGroup
from .point_transformer_conv import SinkhornPointTransformerConv
from .published import load_published_state_dict, to_published_state_dict
from .registry import create_model, list_models, register_model
from .set_transformer import SetTransformer

__all__ = [
    "ISAB",
    "MAB",
    "PCT",
    "PMA",
    "SAB",
    "OffsetAttention",
    "PointCloudTransformer",
    "SampleAndGroup",
    "SetTransformer",
    "SinkhornPointTransformerConv",
    "convert",
    "create_model",
    "dense_clouds",
    "edge_sinkhorn",
    "farthest_point_sample",
    "knn",
    "list_models",
    "load_published_state_dict",
    "register_model",
    "to_published_state_dict",
]
