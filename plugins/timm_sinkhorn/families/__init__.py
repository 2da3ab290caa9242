"""The attention modules of timm that `convert` knows, and what it makes of each."""

from timm.layers import Attention, AttentionPoolLatent, AttentionRope
from timm.layers.global_context import GlobalContext
from timm.layers.lambda_layer import LambdaLayer
from timm.layers.selective_kernel import SelectiveKernelAttn
from timm.layers.split_attn import RadixSoftmax, SplitAttn
from timm.models import (
    beit,
    cait,
    coat,
    crossvit,
    davit,
    edgenext,
    efficientvim,
    eva,
    fastvit,
    maxxvit,
    metaformer,
    mobilevit,
    nest,
    pvt_v2,
    swin_transformer,
    swin_transformer_v2,
    tiny_vit,
    twins,
    visformer,
    vision_transformer_relpos,
    volo,
    xcit,
)
from torch import nn

from ..attention import NormalizedAttention
from .base import ConvertedAttention
from .biased import (
    BeitAttention,
    MaxxvitAttention2d,
    MaxxvitAttentionCl,
    RelPosAttention,
    SwinV2WindowAttention,
    SwinWindowAttention,
    TinyVitAttention,
)
from .plain import (
    DavitWindowAttention,
    FastvitAttention,
    MetaformerAttention,
    NestAttention,
    TwinsLocalAttention,
    VisformerAttention,
    VoloAttention,
)
from .rectangular import PvtAttention, TwinsGlobalAttention
from .rotary import EvaAttention, RopeAttention
from .scores import CaitTalkingHeadAttention, VoloOutlookAttention
from .single_query import CaitClassAttention, CrossvitCrossAttention, LatentAttentionPool, VoloClassAttention

#: timm's class, exactly, to the class that a converted module of it has.
CONVERTED: dict[type[nn.Module], type[nn.Module]] = {
    Attention: NormalizedAttention,
    AttentionPoolLatent: LatentAttentionPool,
    AttentionRope: RopeAttention,
    beit.Attention: BeitAttention,
    cait.ClassAttn: CaitClassAttention,
    cait.TalkingHeadAttn: CaitTalkingHeadAttention,
    crossvit.CrossAttention: CrossvitCrossAttention,
    davit.WindowAttention: DavitWindowAttention,
    eva.EvaAttention: EvaAttention,
    fastvit.Attention: FastvitAttention,
    maxxvit.Attention2d: MaxxvitAttention2d,
    maxxvit.AttentionCl: MaxxvitAttentionCl,
    metaformer.Attention: MetaformerAttention,
    nest.Attention: NestAttention,
    pvt_v2.Attention: PvtAttention,
    swin_transformer.WindowAttention: SwinWindowAttention,
    swin_transformer_v2.WindowAttention: SwinV2WindowAttention,
    tiny_vit.Attention: TinyVitAttention,
    twins.GlobalSubSampleAttn: TwinsGlobalAttention,
    twins.LocallyGroupedAttn: TwinsLocalAttention,
    vision_transformer_relpos.RelPosAttention: RelPosAttention,
    visformer.Attention: VisformerAttention,
    volo.Attention: VoloAttention,
    volo.ClassAttention: VoloClassAttention,
    volo.OutlookAttention: VoloOutlookAttention,
}

#: Modules with a softmax that is no map between tokens, and stays, with the reason; `convert` warns of them.
LEFT_BY_DESIGN: dict[type[nn.Module], str] = {
    coat.FactorAttnConvRelPosEnc: "factorised: keys are normalised over tokens on their own, there is no map",
    davit.ChannelAttention: "attends over channels",
    davit.ChannelAttentionV2: "attends over channels",
    edgenext.CrossCovarianceAttn: "attends over channels",
    efficientvim.HSMSSD: "a state-space mixer",
    LambdaLayer: "keys are normalised over tokens on their own, there is no map",
    mobilevit.LinearSelfAttention: "linear: one score per token, there is no map",
    xcit.XCA: "attends over channels",
}

#: Modules with a softmax that is no attention between anything: gates and weighted means.
NOT_ATTENTION: tuple[type[nn.Module], ...] = (
    GlobalContext,
    RadixSoftmax,
    SelectiveKernelAttn,
    SplitAttn,
    efficientvim.EfficientViM,
    efficientvim.EfficientViMDistilled,
)

__all__ = ["CONVERTED", "LEFT_BY_DESIGN", "NOT_ATTENTION", "ConvertedAttention"]
