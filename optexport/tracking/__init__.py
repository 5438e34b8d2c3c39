"""MLflow: the run, what it holds, the logged model and its registry. The only folder that imports mlflow."""

from optexport.tracking.download import download_model as download_model
from optexport.tracking.run import Tracker as Tracker
from optexport.tracking.run import tracking as tracking
