"""3-D ResNet-18/34/50 for video ("Can Spatiotemporal 3D CNNs Retrace the History of 2D CNNs and ImageNet?", Hara et
al., 2018, table 1).

A ResNet whose kernels have a third axis, over frames. Its first convolution, 7×7×7, keeps the number of frames.
Shortcuts that change the shape are projections ("type B" of https://github.com/kenshohara/3D-ResNets-PyTorch).
The graph ends in the logits of the 400 classes of Kinetics.
"""

from __future__ import annotations

from functools import partial

from ansor_mlflow.networks.families.family import image_classifier
from ansor_mlflow.networks.families.resnet import VARIANTS, append_resnet

NUM_CLASSES = 400
"""Classes of Kinetics."""

NETWORKS = {
    f"resnet3d-{depth}": image_classifier(
        f"resnet3d-{depth}",
        partial(append_resnet, VARIANTS[depth], stem_stride=(1, 2, 2), num_classes=NUM_CLASSES),
        image=(3, 16, 112, 112),
        num_classes=NUM_CLASSES,
    )
    for depth in (18, 34, 50)
}
