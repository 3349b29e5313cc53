"""`sample_patient`: every number of a synthetic patient, drawn from a seed. Nothing is rendered here.

Body space is a reference adult in mm: x to the right, y to the front, z to the head, z = 0 at the top of the right
dome of the diaphragm, the lungs' apex at ``z = height``. The patient's size, posture and bends map it to the world.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cascadeseg.geometry import Grid
from cascadeseg.synthesis.config import SynthesisConfig
from cascadeseg.synthesis.draw import Draw
from cascadeseg.synthesis.findings import Findings, draw_findings
from cascadeseg.synthesis.scanner import Scanner, View, draw_scanner, draw_view, view_grid

RIGHT, LEFT = 0, 1
MOST_PLAIN_BLOOD = 60.0
"""HU of blood above which there is contrast medium in it."""


@dataclass(frozen=True)
class Torso:
    """The shape of the body (mm in body space unless said otherwise)."""

    size: float
    aspect: tuple[float, float, float]
    inspiration: float
    height: float
    half_width: float
    half_depth: float
    exponent: float
    width_taper: float
    front_taper: float
    back_taper: float
    muscle: float
    fat: float
    belly: float
    breast: float
    rib_drop: float
    pectus: float
    kyphosis: float
    scoliosis: tuple[float, float]
    warp: tuple[float, float]
    rotation: tuple[float, float, float]
    offset: tuple[float, float, float]
    field_seed: int
    child: bool
    arms: str


@dataclass(frozen=True)
class Chest:
    """What lies inside the rib cage."""

    dome: tuple[float, float]
    recess: float
    recess_back: float
    recess_front: float
    recess_medial: float
    dome_power: float
    dome_forward: float
    apex_x: float
    apex_y: float
    apex_dip: tuple[float, float]
    carina: float
    vertebra: float
    vertebra_y: float
    gutter: float
    heart_centre: tuple[float, float, float]
    heart_radii: tuple[float, float, float]
    heart_tilt: float
    aorta: float
    pulmonary: float
    cava: float
    trachea: float
    bronchi: tuple[float, float]
    column: float
    column_depth: float
    junction_x: float
    septum: float
    front_fat: float
    blend: float
    low_column: float
    wander: float
    corner: float
    hilum: float
    oesophagus_air: float
    roughness: float
    ribs_felt: float
    tree_seed: int
    leaf: float
    tree_power: float
    paratracheal: tuple[float, float]
    paratracheal_front: float
    airway_wall: float
    hilar_share: float
    hilar_cuff: float
    hilar_vessel: float


@dataclass(frozen=True)
class Abdomen:
    """Bowel, stomach and solid organs.

    ``gas_hu`` of stomach and bowel is above the air outside, ``gas_edge`` (mm) how much wider than a voxel its edge is,
    ``bubbles`` how rare they are in stool, ``folds`` (0.1 to 0.36) how many and how deep the colon's are, and how
    small the cells into which they part its gas, ``walls_mm`` how thick the walls between these are.
    """

    liver: float
    spleen: float
    stomach: float
    stomach_gas: float
    colon: float
    colon_gas: float
    flexure_height: float
    chilaiditi: bool
    loops: int
    loop_gas: float
    seed: int
    gas_hu: float
    gas_edge: float
    bubbles: float
    folds: float
    walls_mm: float = 2.4


@dataclass(frozen=True)
class Hounsfield:
    """Mean HU of each tissue of this patient, and the texture of the lung."""

    air: float
    lumen: float
    fat: float
    deep_fat: float
    muscle: float
    skin: float
    aortic_blood: float
    pulmonary_blood: float
    venous_blood: float
    myocardium: float
    liver: float
    spleen: float
    kidney: float
    stomach: float
    stool: float
    trabecular: float
    cortical: float
    disc: float
    cartilage: float
    breast: float
    lung: float
    gravity: float
    texture: tuple[float, float, float, float]
    texture_seed: int
    rim: float


@dataclass(frozen=True, eq=False)
class Patient:
    """One synthetic patient and the scan made of it: values only, rendered by `render`."""

    seed: int
    config: SynthesisConfig
    torso: Torso
    chest: Chest
    abdomen: Abdomen
    hounsfield: Hounsfield
    findings: Findings
    scanner: Scanner
    view: View
    mirror: bool

    @property
    def native_spacing_mm(self) -> tuple[float, float, float]:
        """The in-plane spacing (twice) and the slice thickness of this scanner."""
        return self.scanner.pixel_mm, self.scanner.pixel_mm, self.scanner.slice_mm

    def field_of_view(self, spacing_mm: float | tuple[float, float, float]) -> Grid:
        """The RAS+ grid of what was saved of this patient, at any spacing (mm)."""
        return view_grid(self, spacing_mm)

    def mirrored(self) -> Patient:
        """The same patient with right and left exchanged: every organ, and the field of view."""
        x, y, z = self.view.centre
        return replace(self, mirror=not self.mirror, view=replace(self.view, centre=(-x, y, z)))


def sample_patient(seed: int, config: SynthesisConfig | None = None) -> Patient:
    """Draw one patient: anatomy, findings, scanner and field of view. Cheap, and the same for the same seed."""
    config = config or SynthesisConfig()
    torso = _draw_torso(Draw(seed, "torso"), config)
    chest = _draw_chest(Draw(seed, "chest"), torso, config)
    hounsfield = _draw_hounsfield(Draw(seed, "hounsfield"), torso, config)
    findings = draw_findings(Draw(seed, "findings"), config.pathology, torso.child)
    findings = _enhanced(findings, hounsfield, Draw(seed, "enhancement"))
    chest = _raised(chest, findings)
    scanner = draw_scanner(Draw(seed, "scanner"), config)
    view = draw_view(Draw(seed, "view"), config, torso)
    return Patient(
        seed=seed,
        config=config,
        torso=torso,
        chest=chest,
        abdomen=_draw_abdomen(Draw(seed, "abdomen"), config),
        hounsfield=hounsfield,
        findings=findings,
        scanner=scanner,
        view=view,
        mirror=Draw(seed, "mirror").chance(0.004),
    )


def _draw_torso(d: Draw, config: SynthesisConfig) -> Torso:
    v = config.anatomy.variation
    bend, beside = config.anatomy.deformity_rate, config.confounders.arms
    child = d.chance(config.anatomy.child_rate)
    inspiration = min(max(d.normal(0.75, 0.24), 0.1), 1.08)
    fat = d.lognormal(7 if child else 14, 0.65 * v, 2.5, 75)
    heavy = d.chance(0.06)
    rotation = d.normal(0, 12 if heavy else 4)
    lost = config.acquisition.posture
    turned = d.pick((0.0, 90.0, 180.0, 270.0), (1 - 0.035 * lost, 0.012 * lost, 0.011 * lost, 0.012 * lost))
    kyphosis = abs(d.normal(0, 1)) if d.chance(0.3 * bend) else 0.25 * d.normal(0, 1)
    torso = Torso(
        size=d.uniform(0.45, 0.85) if child else d.normal(0.98, 0.085 * v),
        aspect=(d.normal(1, 0.05 * v), d.normal(1, 0.055 * v), d.normal(1, 0.055 * v)),
        inspiration=inspiration,
        height=max(112.0, 130 + 80 * inspiration + d.normal(0, 13 * v)),
        half_width=d.normal(140, 9 * v),
        half_depth=d.normal(96, 9 * v),
        exponent=d.uniform(2.15, 2.75),
        width_taper=d.uniform(0.36, 0.5),
        front_taper=d.uniform(0.38, 0.6),
        back_taper=d.uniform(0.08, 0.3),
        muscle=max(9.0, d.normal(20, 5 * v)) * (0.8 if child else 1),
        fat=fat,
        belly=d.uniform(0.1, 0.5) * fat + d.uniform(0, 18),
        breast=d.uniform(18, 55) if not child and d.chance(0.45) else 0.0,
        rib_drop=d.uniform(0.75, 1.2),
        pectus=d.uniform(10, 38) if d.chance(0.03 * bend) else d.uniform(-6, 3),
        kyphosis=kyphosis * 22,
        scoliosis=(d.normal(0, 22) if d.chance(0.08 * bend) else d.normal(0, 3), d.uniform(0, 6.28)),
        warp=(d.uniform(1.5, 8) * config.anatomy.warp, d.uniform(0.4, 1.6) * config.anatomy.warp),
        rotation=(d.normal(0, 4), d.normal(0, 3), rotation + turned),
        offset=(d.uniform(-15, 15), d.uniform(-25, 25), d.uniform(-500, 500)),
        field_seed=d.seed(),
        child=child,
        arms=d.pick(("up", "down", "belly", "none"), (0.72, 0.19 * beside, 0.05 * beside, 0.04)),
    )
    if d.chance(0.15):  # lies askew, or sits up
        about_x, about_y, about_z = torso.rotation
        torso = replace(torso, rotation=(about_x + d.normal(0, 8), about_y + d.normal(0, 11), about_z))
    return torso if child else replace(torso, size=torso.size * _size_limit(torso))


def _size_limit(torso: Torso) -> float:
    """A factor that keeps an adult's chest within human bounds where all its measures were drawn large, or small."""
    x, y, z = torso.aspect
    chest = torso.half_width * torso.half_depth * torso.height * x * y * z * torso.size**3
    ratio = chest / (140 * 96 * 190 * 0.98**3)
    return float((min(max(ratio, 0.5), 1.5) / ratio) ** (1 / 3))


def _draw_chest(d: Draw, torso: Torso, config: SynthesisConfig) -> Chest:
    v = config.anatomy.variation
    breath = 0.6 + 0.4 * torso.inspiration
    enlarged = d.uniform(1.05, 1.4) if d.chance(0.15) else 1.0
    scale = d.normal(1, 0.06 * v) * enlarged
    trachea = max(5.5, d.normal(8.8, 1.3 * v))
    left_dome = d.normal(-13, 8 * v)
    front = torso.half_depth
    return Chest(
        dome=(0.0, left_dome),
        recess=max(20.0, d.normal(58, 16 * v)) * breath,
        recess_back=1 + 1.5 * d.uniform(0.2, 1.0),
        recess_front=d.uniform(0.3, 1.6),
        recess_medial=d.uniform(0.12, 0.7),
        dome_power=d.uniform(1.9, 2.9),
        apex_x=d.normal(43, 4 * v),
        apex_y=d.normal(-16, 4 * v),
        apex_dip=(d.uniform(0, 8), d.uniform(0, 8)),
        carina=d.uniform(0.55, 0.66) * torso.height,
        vertebra=d.normal(17, 1.5 * v),
        vertebra_y=-d.uniform(0.46, 0.56) * torso.half_depth,
        gutter=d.uniform(0.35, 0.8),
        heart_centre=(-d.normal(20, 6 * v), 0.33 * front - 4 * (enlarged - 1), d.normal(34, 7 * v)),
        heart_radii=(58 * scale, 45 * scale * d.normal(1, 0.06 * v), 52 * scale * d.normal(1, 0.07 * v)),
        heart_tilt=d.uniform(0.15, 0.6),
        aorta=max(9.0, d.normal(13.5, 2 * v)) * (d.uniform(1.1, 1.7) if d.chance(0.08) else 1),
        pulmonary=d.uniform(9, 14),
        cava=d.uniform(7, 10),
        trachea=trachea,
        bronchi=(trachea * d.uniform(0.65, 0.8), trachea * d.uniform(0.55, 0.72)),
        column=d.uniform(23, 33),
        column_depth=d.uniform(28, 40),
        junction_x=d.normal(-3, 6 * v),
        septum=d.uniform(0.7, 5) if d.chance(0.85) else d.uniform(5, 16),
        front_fat=d.lognormal(8, 0.7, 0, 40) * min(1.6, 0.5 + torso.fat / 28),
        blend=d.uniform(4, 18),
        low_column=d.uniform(0.15, 0.6),
        wander=d.uniform(0, 5),
        corner=d.uniform(1, 9),
        hilum=d.uniform(0.75, 1.3),
        oesophagus_air=d.uniform(2, 8) if d.chance(0.45 * config.confounders.bowel_gas) else 0.0,
        roughness=d.uniform(0.5, 2.2),
        ribs_felt=d.uniform(0.2, 1.3),
        tree_seed=d.seed(),
        leaf=d.uniform(0.42, 0.75),
        tree_power=d.uniform(2.8, 3.4),
        paratracheal=(d.uniform(-8, 6), d.uniform(-8, 40)),
        paratracheal_front=d.uniform(-10, 14),
        airway_wall=d.uniform(0.5, 1.8),
        hilar_share=d.uniform(0.4, 1.0),
        hilar_cuff=d.uniform(0.5, 3),
        hilar_vessel=d.uniform(2.0, 4.0),
        dome_forward=min(max(d.normal(0.3, 0.13 * v), 0.0), 0.55),
    )


def _raised(chest: Chest, findings: Findings) -> Chest:
    """The chest with its diaphragm raised where the findings say so."""
    right, left = chest.dome
    return replace(chest, dome=(right + findings.raised[RIGHT], left + findings.raised[LEFT]))


def _enhanced(findings: Findings, hounsfield: Hounsfield, d: Draw) -> Findings:
    """The findings with airless lung brighter where there is contrast medium: it is perfused, as fluid is not."""
    contrast = hounsfield.pulmonary_blood > MOST_PLAIN_BLOOD
    return replace(findings, dense_hu=findings.dense_hu + d.uniform(15, 70) * contrast)


def _draw_abdomen(d: Draw, config: SynthesisConfig) -> Abdomen:
    gas = config.confounders.bowel_gas
    abdomen = Abdomen(
        liver=d.normal(1, 0.1),
        spleen=d.lognormal(1, 0.2, 0.6, 2.2),
        stomach=d.uniform(0.6, 1.35),
        stomach_gas=d.uniform(0.05, 0.85) if d.chance(0.65 * gas) else 0.0,
        colon=d.uniform(26, 44) if d.chance(0.1 * gas) else d.lognormal(16, 0.33, 9, 40),
        colon_gas=d.uniform(0, 1) ** 0.7 * min(gas, 1.0),
        flexure_height=d.uniform(0, 1) if d.chance(0.75) else -0.6,
        chilaiditi=d.chance(0.1 * gas),
        loops=d.integer(8, 34),
        loop_gas=0.7 * d.uniform(0, 1) ** 2 * min(gas, 1.0),
        seed=d.seed(),
        gas_hu=d.about(10, 45, config.randomisation.intensity),
        gas_edge=d.uniform(0.5, 4.5),
        bubbles=d.uniform(0.6, 1.6),
        folds=d.uniform(0.1, 0.32),
    )
    if not d.chance(config.confounders.high_colon * gas):
        return abdomen
    return replace(
        abdomen,
        colon=d.uniform(18, 36),
        colon_gas=d.uniform(0.45, 1),
        flexure_height=d.uniform(0.7, 1),
        folds=d.uniform(0.12, 0.36),
        walls_mm=d.uniform(2, 5.5),
    )


def _draw_hounsfield(d: Draw, torso: Torso, config: SynthesisConfig) -> Hounsfield:
    r, t = config.randomisation.intensity, config.randomisation.texture
    contrast = d.chance(0.5 * config.randomisation.contrast)
    blood = d.normal(42, 6 * r)
    arterial = blood + (d.uniform(60, 420) if contrast else 0)
    pulmonary = blood + (d.uniform(60, 450) if contrast else 0)
    muscle = d.normal(52, 9 * r) + (10 if contrast else 0)
    fatty = d.uniform(20, 60) if d.chance(0.12 * r) else 0
    lean = d.normal(56, 9 * r) + (d.uniform(10, 70) if contrast else 0)
    undiluted = d.uniform(200, 900) if contrast and d.chance(0.2) else 0
    closed = 1 - torso.inspiration
    hounsfield = Hounsfield(
        air=d.normal(-1000, 4 * r),
        lumen=d.normal(-988, 12 * r),
        fat=d.normal(-103, 9 * r),
        deep_fat=d.normal(-98, 10 * r),
        muscle=muscle,
        skin=d.normal(10, 25 * r),
        aortic_blood=arterial,
        pulmonary_blood=pulmonary,
        venous_blood=blood + (d.uniform(30, 160) if contrast else 0) + undiluted,
        myocardium=blood + (d.uniform(30, 80) if contrast else 4),
        liver=lean - fatty,
        spleen=lean + d.normal(-8, 5 * r) + (d.uniform(0, 50) if contrast else 0),
        kidney=d.normal(34, 5 * r) + (d.uniform(60, 150) if contrast else 0),
        stomach=d.uniform(100, 400) if d.chance(0.2 * r) else d.about(5, 45, r),
        stool=d.about(-95, 45, r),
        trabecular=d.about(90, 260, r),
        cortical=d.about(350, 900, r),
        disc=d.normal(85, 15 * r),
        cartilage=d.normal(95, 20 * r) + (d.uniform(60, 250) if d.chance(0.4 * r) else 0),
        breast=d.about(-60, 40, r),
        lung=min(max(-730 - 160 * torso.inspiration + d.normal(0, 32 * r), -940.0), -540.0),
        gravity=d.about(15, 80, r) + 80 * closed,
        texture=(d.uniform(5, 30) * t, d.uniform(4, 18) * t, d.uniform(6, 30) * t, d.uniform(10, 150) * t),
        texture_seed=d.seed(),
        rim=0.0,
    )
    any_density = d.chance(config.randomisation.density)
    lung = -930 + 330 * d.uniform(0, 1) ** 2 if any_density else hounsfield.lung
    return replace(hounsfield, lung=lung, rim=d.about(-5, 50, r))
