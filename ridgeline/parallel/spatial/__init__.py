"""Domain decomposition: each rank owns a tile of the image, and halos are exchanged."""

from ridgeline.parallel.spatial.apply import apply_spatial, tile_inputs
from ridgeline.parallel.spatial.grid import TileGrid
from ridgeline.parallel.spatial.map import tile_map_svg
from ridgeline.parallel.spatial.tensor import TileTensor

__all__ = ["TileGrid", "TileTensor", "apply_spatial", "tile_inputs", "tile_map_svg"]
