"""MLflow runs, uploads, models and the registry. The only package that imports mlflow."""

from optexport.tracking.download import download_model as download_model
from optexport.tracking.run import Tracker as Tracker
from optexport.tracking.run import tracking as tracking
