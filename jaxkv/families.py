"""What model families are made of, for one of your own: see `register_family`."""

from jaxkv.models.config import Experts as Experts
from jaxkv.models.config import LayerKind as LayerKind
from jaxkv.models.config import ModelConfig as ModelConfig
from jaxkv.models.decoder import Decoder as Decoder
from jaxkv.models.decoder import DecoderLayer as DecoderLayer
from jaxkv.models.family import Family as Family
from jaxkv.models.hf_config import HfConfig as HfConfig
from jaxkv.models.hf_config import from_hf as from_hf
from jaxkv.models.hf_geometry import layer_kinds as layer_kinds
from jaxkv.models.hf_geometry import read_biases as read_biases
from jaxkv.models.hf_geometry import read_geometry as read_geometry
from jaxkv.models.hf_geometry import read_rope as read_rope
from jaxkv.models.hf_geometry import read_window as read_window
from jaxkv.models.hf_geometry import read_windows as read_windows
from jaxkv.models.layers import linear as linear
from jaxkv.models.layers import param as param
from jaxkv.models.layers import read as read
from jaxkv.models.layers import rms_norm as rms_norm
from jaxkv.models.registry import register_family as register_family
from jaxkv.models.registry import unregister_family as unregister_family
from jaxkv.models.rope import Rope as Rope
from jaxkv.models.weight_names import Names as Names
from jaxkv.models.weight_names import decoder_weights as decoder_weights
from jaxkv.models.weights import Part as Part
from jaxkv.models.weights import WeightMap as WeightMap
from jaxkv.models.weights import whole as whole
