"""The models of the benchmark `gallery.py`: what people export, with random weights, by family."""

from gallery_models import classical, classification, detection, keras, multimodal, pixels, quantized, recurrent, text
from gallery_models.entry import GalleryModel

_ROOMS = (classification, detection, pixels, text, multimodal, recurrent, quantized, classical, keras)
MODELS: tuple[GalleryModel, ...] = tuple(model for room in _ROOMS for model in room.MODELS)
GALLERY: dict[str, GalleryModel] = {model.name: model for model in MODELS}
"""Every model by its name."""
