"""What is wrong with the patient: every pathology and device, drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cascadeseg.synthesis.config import PathologyConfig
from cascadeseg.synthesis.draw import Draw

Pair = tuple[float, float]


@dataclass(frozen=True)
class Lesion:
    """A nodule or mass; its place is drawn when the lungs are known.

    ``rim`` is one near the pleura, ``hilar`` one at a vessel of the hilum; what ``grows`` does not end at the pleura.
    """

    side: int
    radius: float
    hu: float
    cavity: float
    lobulation: float
    ground_glass: bool
    rim: bool
    hilar: bool
    grows: bool


@dataclass(frozen=True)
class Findings:
    """Pathology of both lungs; pairs are (right, left), weights 0 to 1, lengths in body mm.

    Attributes:
        ground_glass: weight of ground glass at its densest, 0 for none.
        ground_glass_extent: share of the lung, roughly.
        consolidation: weight, 0 for none; ``consolidation_extent`` as above.
        peripheral: -1 central .. 1 subpleural preference of both.
        lobar: which lobe of the side is solid (-1 none, 0 lower, 1 middle or lingula, 2 upper).
        white: weight of a whole lung without air.
        atelectasis: thickness of the dependent dense band.
        emphysema: 0 none .. 1 severe: how much of the lung is destroyed, at the top more than at the base.
        fibrosis, mosaic: strength.
        bullae: number of bullae in either lung.
        effusion: thickness of fluid at the dependent wall.
        subpulmonic: how much of the fluid lies on the diaphragm.
        compression: thickness of squeezed lung beside the fluid.
        pneumothorax: depth of free air at the non-dependent wall.
        missing: 1 where the lung was removed or never grew.
        raised: how far the dome is raised.
        pleura: thickness of plaques or fat on the costal pleura.
        devices: names of lines, tubes and implants.
        wall_air: gas between the muscles of the chest wall: the side, and its strength (0: none).
        dependent: density of the lowest lung at the wall (weight, 0 for none), and the depth in which it fades.
        shift: how far the mediastinum has moved to the right (left: negative), by lost lung, fluid or free air.
        pockets: thickness of a lens of fluid that adhesions keep at the wall, 0 for none.
        pocket_width: its radius along the wall, in thicknesses.
        settled: how much more of ground glass and consolidation lies at the base and the dependent wall, 0 for none.
    """

    ground_glass: float
    ground_glass_extent: float
    consolidation: float
    consolidation_extent: float
    peripheral: float
    lower: float
    blob: float
    lobar: tuple[int, int]
    white: Pair
    atelectasis: Pair
    emphysema: Pair
    fibrosis: float
    mosaic: float
    bullae: int
    lesions: tuple[Lesion, ...]
    effusion: Pair
    subpulmonic: Pair
    compression: Pair
    pneumothorax: Pair
    missing: tuple[int, int]
    raised: Pair
    pleura: float
    hernia: float
    pull_up: float
    dense_hu: float
    fluid_hu: float
    devices: tuple[str, ...]
    seed: int
    wall_air: tuple[int, float]
    dependent: Pair
    shift: float
    pockets: Pair
    pocket_width: float
    settled: float


def draw_findings(d: Draw, config: PathologyConfig, child: bool) -> Findings:
    """Draw the findings of one patient."""
    f = config.rate * (config.healthy_factor if d.chance(config.healthy_share) else 1.0)
    glass = d.uniform(0.15, 0.75) if d.chance(config.ground_glass * f) else 0.0
    solid = min(1.0, d.uniform(0.55, config.consolidation_density)) if d.chance(config.consolidation * f) else 0.0
    missing = d.integer(0, 1) if d.chance(config.missing_lung * f) else -1
    white = d.integer(0, 1) if d.chance(config.white_lung * f) else -1
    deep = config.effusion_depth
    effusion = [d.lognormal(deep, 0.7, 3, 5.5 * deep) if d.chance(config.effusion * f) else 0.0 for _ in range(2)]
    if effusion[0] and d.chance(0.5):
        effusion[1] = d.lognormal(0.9 * deep, 0.6, 3, 4 * deep)
    wide = config.pneumothorax_depth
    air = [d.lognormal(wide, 0.7, 3, 4.5 * wide) if d.chance(config.pneumothorax * f) else 0.0 for _ in range(2)]
    smoker = 0.0 if child else (d.uniform(0.25, 1.0) if d.chance(config.emphysema * f) else 0.0)
    collapse = d.uniform(4, 40) if d.chance(config.atelectasis * f) else 0.0
    extent = d.uniform(0.05, 0.75)
    findings = Findings(
        ground_glass=glass,
        ground_glass_extent=extent,
        consolidation=solid,
        consolidation_extent=d.uniform(0.03, 0.5) * (1 if d.chance(0.8) else 2 * config.consolidation_reach),
        peripheral=d.uniform(-0.6, 1.0),
        lower=d.uniform(-0.5, 1.0),
        blob=d.uniform(12, 38),
        lobar=_side_of(d, d.integer(0, 2) if d.chance(config.lobar * f) else -1, -1),
        white=(d.uniform(0.93, 1) if white == 0 else 0.0, d.uniform(0.93, 1) if white == 1 else 0.0),
        atelectasis=(collapse * d.uniform(0.5, 1.1), collapse * d.uniform(0.5, 1.1)),
        emphysema=(smoker * d.uniform(0.7, 1), smoker * d.uniform(0.7, 1)),
        fibrosis=d.uniform(0.3, 1) if d.chance(config.fibrosis * f) else 0.0,
        mosaic=d.uniform(20, 120) if d.chance(config.mosaic * f) else 0.0,
        bullae=d.integer(1, 14) if d.chance(config.bullae * f) else 0,
        lesions=_draw_lesions(d, config.nodules * f, config.mass_mm),
        effusion=(effusion[0], effusion[1]),
        subpulmonic=(d.uniform(0, 45) * d.chance(config.subpulmonic), d.uniform(0, 45) * d.chance(config.subpulmonic)),
        compression=(d.uniform(4, 30) * d.chance(config.compression), d.uniform(4, 30) * d.chance(config.compression)),
        pneumothorax=(air[0], air[1]),
        missing=(int(missing == 0), int(missing == 1)),
        raised=_draw_raised(d, config.raised_diaphragm * config.rate, missing),
        pleura=d.uniform(2, 10) if d.chance(config.pleural_thickening * f) else 0.0,
        hernia=d.uniform(0.4, 1.6) if d.chance(config.hiatal_hernia * config.rate) else 0.0,
        pull_up=d.uniform(9, 22) if d.chance(config.pull_up * config.rate) else 0.0,
        dense_hu=d.normal(35, 8) + (d.uniform(0, 25) if d.chance(0.4) else 0),
        fluid_hu=d.normal(12, 9),
        devices=_draw_devices(d, config.devices * (config.rate > 0)),
        seed=d.seed(),
        wall_air=(d.integer(0, 1), d.uniform(0.4, 1.0) if d.chance(config.subcutaneous_air * f) else 0.0),
        dependent=(d.uniform(0.1, 0.8) if d.chance(config.dependent * config.rate) else 0.0, d.uniform(5, 18)),
        shift=0.0,
        pockets=(0.0, 0.0),
        pocket_width=0.0,
        settled=0.0,
    )
    implants = _draw_implants(d, config.devices * (config.rate > 0), child)
    findings = replace(findings, shift=_draw_shift(d, findings), devices=findings.devices + implants)
    pockets = [d.lognormal(16, 0.5, 5, 45) * d.chance(config.loculated * f) for _ in range(2)]
    findings = replace(findings, pockets=(pockets[0], pockets[1]), pocket_width=d.uniform(1.2, 3.0))
    settled = d.uniform(0.4, 1.6) if d.chance(0.5) else 0.0
    # What has settled holds less air.
    return replace(findings, settled=settled, consolidation=min(1.0, solid + 0.3 * settled) if solid else 0.0)


def _side_of(d: Draw, value: int, nothing: int) -> tuple[int, int]:
    return (value, nothing) if d.chance(0.55) else (nothing, value)


def _draw_raised(d: Draw, rate: float, missing: int) -> Pair:
    raised = [0.0, 0.0]
    if d.chance(rate):
        raised[d.integer(0, 1)] = d.uniform(12, 65)
    if missing >= 0:
        raised[missing] += d.uniform(10, 50)
    return raised[0], raised[1]


def _draw_lesions(d: Draw, rate: float, mass_mm: float) -> tuple[Lesion, ...]:
    if not d.chance(rate):
        return ()
    few = d.chance(0.7)
    count = d.integer(1, 3) if few else d.integer(4, 18)
    return tuple(
        Lesion(
            side=d.integer(0, 1),
            radius=d.lognormal(mass_mm if few else 6, 0.7, 2.5, 48),
            hu=d.normal(38, 18),
            cavity=d.uniform(0.3, 0.75) if d.chance(0.1) else 0.0,
            lobulation=d.uniform(0.05, 0.35),
            ground_glass=d.chance(0.12),
            rim=d.chance(0.45),
            hilar=d.chance(0.18),
            grows=d.chance(0.5),
        )
        for _ in range(count)
    )


def _draw_devices(d: Draw, rate: float) -> tuple[str, ...]:
    chances = {
        "central_line": 0.5, "pacemaker": 0.18, "tracheal_tube": 0.2, "gastric_tube": 0.25, "chest_drain": 0.12,
        "sternal_wires": 0.2, "spinal_rods": 0.06, "electrodes": 0.5, "stent": 0.06,
    }  # fmt: skip
    if not d.chance(rate):
        return ()
    return tuple(name for name, p in chances.items() if d.chance(p))


def _draw_implants(d: Draw, rate: float, child: bool) -> tuple[str, ...]:
    """Metal that people come with: drawn for itself, as it has nothing to do with lines and tubes."""
    chances = {"clips": 0.2, "dental": 0.8, "shoulder_prosthesis": 0.12, "hip_prosthesis": 0.2}
    if not d.chance(rate) or child:
        return ()
    return tuple(name for name, p in chances.items() if d.chance(p))


def _draw_shift(d: Draw, f: Findings) -> float:
    """The mediastinum goes to where lung was lost, and away from much fluid and from air under tension."""
    pull, push = d.uniform(12, 42), d.uniform(0.1, 0.45)
    tension = d.uniform(10, 35) if d.chance(0.25) else 0.0
    collapsed, shrunk = d.chance(0.5), d.uniform(0, 12)
    shift = 0.0
    for side, sign in ((0, 1.0), (1, -1.0)):
        if f.missing[side]:
            shift += sign * pull
        elif f.white[side] and collapsed:
            shift += sign * 0.8 * pull
        elif f.lobar[side] >= 0 and collapsed:
            shift += sign * shrunk
        shift -= sign * push * max(f.effusion[side] - 25, 0)
        shift -= sign * tension * (f.pneumothorax[side] > 0)
    return min(max(shift, -45.0), 45.0)
