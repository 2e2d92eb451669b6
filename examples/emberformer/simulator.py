"""Wildfires from a seed: a cellular automaton over generated terrain, for when there is no data.

A burning cell ignites each of its eight neighbours with a probability that grows with the neighbour's fuel, along the
wind and uphill, as in Alexandridis, Vakalis, Siettos and Bafas, "A cellular automata model for forest fire spread
prediction", Applied Mathematics and Computation 204 (2008), whose constants are used:

    p = p_h (1 + vegetation) (1 + density) exp(V (c1 + c2 (cos t - 1))) exp(a slope)

V the wind's speed in m/s, t the angle between wind and direction of spread, slope the angle to the neighbour in
degrees. Water does not burn. All fires of a call are computed at once, (S, H, W); the same seed gives the same fires.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

CHANNELS = (
    "elevation",
    "slope_x",
    "slope_y",
    "steepness",
    "grass",
    "shrub",
    "forest",
    "density",
    "moisture",
    "water",
)
IGNITION, WIND_1, WIND_2, SLOPE = 0.58, 0.045, 0.131, 0.078
VEGETATION = {"grass": -0.3, "shrub": 0.0, "forest": 0.4}
FASTEST_WIND = 12.0  # m/s
RELIEF = 40.0  # height of the highest cell, in cells
STEPS_PER_FRAME, BURNING_STEPS, STEPS_TO_BURN = 8, 5, 2.0
NEIGHBOURS = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx]


@dataclass
class Landscape:
    """static (S, 10, H, W) float32, the CHANNELS, each from 0 to 1 but the slopes, from -1 to 1."""

    static: torch.Tensor

    def channel(self, name):
        return self.static[:, CHANNELS.index(name)]


def fractal(generator, count, size, coarsest=2, octaves=5):
    """Smooth noise, (count, size, size), mean 0."""
    total = torch.zeros(count, 1, size, size)
    for octave in range(octaves):
        cells = min(coarsest * 2**octave, size) + 2
        noise = torch.randn(count, 1, cells, cells, generator=generator)
        total += F.interpolate(noise, size=(size, size), mode="bicubic", align_corners=True) / 2**octave
    return total[:, 0]


def spread_out(values):
    """Each map scaled to 0 ... 1."""
    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    return (values - low) / (high - low)


def gradient(values):
    """Central differences along y and x."""
    padded = F.pad(values[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    return (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) / 2, (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) / 2


def landscapes(generator, count, size):
    """Mountains, vegetation by height and noise, lakes in the valleys and a river through most maps."""
    elevation = spread_out(fractal(generator, count, size))
    dy, dx = (RELIEF * part for part in gradient(elevation))
    wetness = fractal(generator, count, size, coarsest=3)
    moisture = torch.sigmoid(1.2 * wetness + 3 * (0.4 - elevation))
    # A river runs where a noise of its own changes its sign: a line of even width.
    course = fractal(generator, count, size, coarsest=1, octaves=4)
    cy, cx = gradient(course)
    river = (course.abs() < 0.9 * torch.hypot(cy, cx)) & (torch.rand(count, 1, 1, generator=generator) < 0.5)
    water = river | (elevation < 0.06)
    kind = fractal(generator, count, size, coarsest=3) + 1.5 * (moisture - 0.5)
    forest, grass = kind > 0.25, kind < -0.45
    density = spread_out(fractal(generator, count, size, coarsest=4))
    land = ~water
    values = {
        "elevation": elevation,
        "slope_x": dx.clamp(-1, 1),
        "slope_y": dy.clamp(-1, 1),
        "steepness": torch.hypot(dy, dx).clamp(max=1),
        "grass": grass & land,
        "shrub": ~grass & ~forest & land,
        "forest": forest & land,
        "density": density * land,
        "moisture": moisture,
        "water": water,
    }
    return Landscape(torch.stack([values[name].float() for name in CHANNELS], 1))


def winds(generator, count, frames):
    """Speed in m/s and the direction that it blows to in radians, (S, frames) each, which change slowly."""
    speed = 2 + (FASTEST_WIND - 2) * torch.rand(count, 1, generator=generator)
    turn = 2 * math.pi * torch.rand(count, 1, generator=generator)
    speed = speed + torch.randn(count, frames, generator=generator).cumsum(1) * 0.5
    turn = turn + torch.randn(count, frames, generator=generator).cumsum(1) * 0.15
    return speed.clamp(0, FASTEST_WIND), turn % (2 * math.pi)


def shifted(values, dy, dx):
    """values (S, H, W) of the neighbour at (-dy, -dx): what lies there comes here; zeros from outside."""
    height, width = values.shape[1:]
    padded = F.pad(values, (1, 1, 1, 1))
    return padded[:, 1 - dy : 1 - dy + height, 1 - dx : 1 - dx + width]


def fuel(landscape):
    """What a cell adds to the probability that it catches fire, (S, H, W); 0 on water."""
    vegetation = sum(factor * landscape.channel(name) for name, factor in VEGETATION.items())
    density = 0.7 * landscape.channel("density") - 0.4
    dryness = 1 - 0.5 * landscape.channel("moisture")
    return IGNITION * (1 + vegetation) * (1 + density) * dryness * (1 - landscape.channel("water"))


def chances(landscape):
    """{(dy, dx): (S, H, W)}: the probability that a cell without wind catches fire in a step from its burning neighbour
    at (-dy, -dx)."""
    height, fuel_of, found = RELIEF * landscape.channel("elevation"), fuel(landscape), {}
    for dy, dx in NEIGHBOURS:
        distance = math.hypot(dy, dx)
        angle = torch.rad2deg(torch.atan((height - shifted(height, dy, dx)) / distance)).clamp(-30, 30)
        found[dy, dx] = fuel_of * torch.exp(SLOPE * angle) / (STEPS_TO_BURN * distance)
    return found


def step(age, chance_of, speed, turn, draws):
    """One step of all fires, in place. age (S, H, W) int8: 0 unburnt, 1 ... BURNING_STEPS burning, more burnt out;
    speed and turn (S,); draws (S, H, W) uniform."""
    burning = ((age > 0) & (age <= BURNING_STEPS)).float()
    escapes = torch.ones_like(draws)
    for dy, dx in NEIGHBOURS:
        cosine = torch.cos(turn - math.atan2(dy, dx))
        wind = torch.exp(speed * (WIND_1 + WIND_2 * (cosine - 1)))[:, None, None]
        escapes *= 1 - shifted(burning, dy, dx) * (wind * chance_of[dy, dx]).clamp(max=0.95)
    caught = (age == 0) & (draws > escapes)
    age += (age > 0) & (age <= BURNING_STEPS)
    age[caught] = 1


def ignite(generator, landscape):
    """age (S, H, W): a burning square of 3x3 cells on dry land in the middle of each map."""
    count, size = len(landscape.static), landscape.static.shape[-1]
    third = size // 3
    middle = fuel(landscape)[:, third:-third, third:-third]
    best = middle + 0.2 * torch.rand(middle.shape, generator=generator)
    y, x = (place + third for place in torch.unravel_index(best.flatten(1).argmax(1), middle.shape[1:]))
    age = torch.zeros(count, size, size, dtype=torch.int8)
    each = torch.arange(count)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            age[each, y + dy, x + dx] = 1
    return age * (landscape.channel("water") == 0)


@dataclass
class Fires:
    """What simulate returns: masks bool (S, frames, H, W) of all that has caught fire by then; wind (S, frames, 2),
    speed and direction from 0 to 1; the landscape."""

    masks: torch.Tensor
    wind: torch.Tensor
    landscape: Landscape


def simulate(count, size, frames, seed):
    """`count` fires over squares of `size` cells."""
    generator = torch.Generator().manual_seed(seed)
    landscape = landscapes(generator, count, size)
    speed, turn = winds(generator, count, frames)
    age, chance_of = ignite(generator, landscape), chances(landscape)
    masks = torch.empty(count, frames, size, size, dtype=torch.bool)
    for frame in range(frames):
        for _ in range(STEPS_PER_FRAME):
            draws = torch.rand(age.shape, generator=generator)
            step(age, chance_of, speed[:, frame], turn[:, frame], draws)
        masks[:, frame] = age > 0
    return Fires(masks, torch.stack((speed / FASTEST_WIND, turn / (2 * math.pi)), -1), landscape)
