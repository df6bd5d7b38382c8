# --8<-- [start:example]
import numpy as np
import pyarrow as pa

from airflow_geneva import udf
from airflow_geneva.functions import images

SIDE = 224


@udf(
    data_type=pa.list_(pa.float32(), 2048),
    preprocess=images((SIDE, SIDE)),  # Pillow, on CPUs; your own function as well
    preprocess_workers=4,
    num_gpus=1,
    batch_size=128,
    on_error="skip",
)
class Features:
    def __init__(self) -> None:  # once per process
        import torch
        from torchvision.models import ResNet50_Weights, resnet50

        network = resnet50(weights=ResNet50_Weights.DEFAULT)
        network.fc = torch.nn.Identity()
        self.torch, self.network = torch, network.eval().cuda()
        self.normalize = ResNet50_Weights.DEFAULT.transforms()

    def __call__(self, pixels: pa.FixedSizeListArray) -> np.ndarray:
        pictures = self.torch.tensor(np.asarray(pixels.flatten()).reshape(-1, SIDE, SIDE, 3)).cuda()
        with self.torch.inference_mode():
            return self.network(self.normalize(pictures.permute(0, 3, 1, 2))).cpu().numpy()


# --8<-- [end:example]
