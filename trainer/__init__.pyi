"""What `import trainer` offers. trainer/__init__.py reads this list: a name is imported when it is first used."""

from .config.parse import load_config as load_config
from .config.sections import RunConfig as RunConfig
from .models.stage import LossFunction as LossFunction
from .models.stage import Microbatch as Microbatch
from .parallel.mesh import mesh_of as mesh_of
from .parallel.world import World as World
from .parallel.world import join_world as join_world
from .parallel.world import leave_world as leave_world
from .plan.plan import Plan as Plan
from .plan.plan import make_plan as make_plan
from .run.after_step import Callback as Callback
from .run.data import RunData as RunData
from .run.data import open_data as open_data
from .run.data import training_batches as training_batches
from .run.engine import Engine as Engine
from .run.step_report import FinishedStep as FinishedStep
from .run.step_report import StepReport as StepReport
from .run.train import TrainResult as TrainResult
from .run.train import train as train
from .tasks.loaded_model import Model as Model
