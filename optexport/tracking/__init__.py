"""MLflow runs, uploads, models and the registry. The only package that imports mlflow."""

from optexport.tracking.background import TrackingProcess as TrackingProcess
from optexport.tracking.background import make_tracker as make_tracker
from optexport.tracking.background import tracking_process as tracking_process
from optexport.tracking.download import download_model as download_model
from optexport.tracking.run import Tracker as Tracker
from optexport.tracking.run import tracking as tracking
