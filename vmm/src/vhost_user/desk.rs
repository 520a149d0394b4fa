//! The control socket of a vhost-user server: its requests, and how it changes hands in a takeover.
//!
//! Invariant: the socket's file is the old server's until nothing of a takeover can fail any more.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use virtio_devices::vhost_user::StopToken;

use super::orders::Orders;
use super::roster::Roster;
use crate::control::{Control, Request, Server};
use crate::exchange::{self, Desk, Listed, ServedDisk};
use crate::socket::{Socket, SocketError, is_file_of};
use crate::takeover::{ControlSocket, Offer};

/// The server, as its control socket sees it.
pub(super) struct VhostUserDesk {
    roster: Arc<Roster>,
    orders: Orders,
    stop: StopToken,
}

impl VhostUserDesk {
    pub(super) fn new(roster: &Arc<Roster>, orders: &Orders, stop: &StopToken) -> Arc<Self> {
        Arc::new(Self {
            roster: Arc::clone(roster),
            orders: orders.clone(),
            stop: stop.clone(),
        })
    }
}

impl Desk for VhostUserDesk {
    const SERVER: &'static str = "a vhost-user server";

    fn info(&self) -> Result<Value, String> {
        let state = if self.stop.is_stopped() {
            "stopping"
        } else {
            "serving"
        };
        let mut info = exchange::list(&self.disks()?);
        info["state"] = state.into();
        info["process"] = std::process::id().into();
        Ok(info)
    }

    fn disks(&self) -> Result<Vec<Listed>, String> {
        let served = self.roster.served();
        let list = served.iter().map(|served| Listed {
            id: served.name.clone(),
            place: served.socket.path().display().to_string(),
            io: served.server.driver_name().to_owned(),
            disk: Arc::clone(&served.disk),
        });
        Ok(list.collect())
    }

    fn disk(&self, id: &str) -> Result<Arc<ServedDisk>, String> {
        Ok(Arc::clone(&self.roster.find(id)?.disk))
    }

    fn resize(&self, id: &str, size: u64, force: bool) -> Result<Value, String> {
        let failed = |error: String| format!("cannot resize disk {id} to {size} bytes: {error}");
        let served = self.roster.find(id)?;
        let _alone = served.disk.change(size, force).map_err(failed)?;
        let size = served.disk.grow_to(size).map_err(failed)?;
        match served.server.config_channel().notify() {
            Ok(true) => {}
            Ok(false) => tracing::info!(
                disk = id,
                "no client can be told of the new size; a guest sees it when it starts"
            ),
            Err(error) => {
                tracing::warn!(disk = id, %error, "the client was not told of the new size; its guest sees it when it starts again")
            }
        }
        Ok(json!({ "id": id, "size": size }))
    }

    fn special(&self, request: Request) -> Result<Value, String> {
        match request {
            Request::DiskAdd { disk, socket } => self.orders.ask(move |roster| roster.add(&disk, socket)),
            Request::DiskRemove { id } => self.orders.ask(move |roster| roster.remove(&id)),
            Request::Reload {} => self.orders.ask(|roster| roster.reload()),
            other => Err(exchange::refusal(Self::SERVER, &other)),
        }
    }

    fn stop(&self) {
        tracing::info!(event = "stopping", "stopping, as the control socket was asked to");
        self.stop.stop();
    }
}

/// A control socket before it is served.
#[derive(Debug)]
pub(super) struct ControlPlace {
    socket: Socket,
    /// The socket's file, for the next server.
    file: OwnedFd,
    /// True if it is an old server's, which continues with it if the takeover fails.
    pub(super) is_adopted: bool,
}

impl ControlPlace {
    /// Creates the socket at `path`, or continues with the one of an old server that is there.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path.
    pub(super) fn take(path: &Path, offer: Option<&mut Offer>) -> Result<Self, SocketError> {
        let offered =
            offer.and_then(|offer| offer.control.take_if(|control| is_file_of(&control.file, path)));
        let is_adopted = offered.is_some();
        let socket = match offered {
            Some(ControlSocket { listener, .. }) => Socket::adopt(listener, path, false)?,
            None => Socket::listen(path)?,
        };
        Ok(Self {
            file: socket.file()?,
            socket,
            is_adopted,
        })
    }

    /// Takes ownership of the socket's file.
    ///
    /// # Errors
    ///
    /// [`SocketError`] if it is gone.
    pub(super) fn keep(&self) -> Result<(), SocketError> {
        self.socket.keep()
    }

    pub(super) fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Serves requests, by threads as confined as the calling one.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path.
    pub(super) fn serve(self, desk: &Arc<VhostUserDesk>) -> Result<ServedControl, SocketError> {
        let refusal = exchange::refusal(VhostUserDesk::SERVER, &Request::PassLocks {});
        let server = Server {
            locks: Arc::new(move || Err(std::io::Error::other(refusal.clone()))),
            ..exchange::server(desk)
        };
        Ok(ServedControl {
            control: Control::serve_on(self.socket, &server)?,
            file: self.file,
        })
    }
}

/// The control socket while it is served.
#[derive(Debug)]
pub(super) struct ServedControl {
    control: Control,
    file: OwnedFd,
}

impl ServedControl {
    /// Lets no client in until [`ServedControl::resume`], and returns the socket for a new server.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub(super) fn pause(&self) -> std::io::Result<ControlSocket> {
        self.control.pause();
        Ok(ControlSocket {
            listener: self.control.socket().listener().try_clone()?,
            file: self.file.try_clone()?,
        })
    }

    /// The takeover has failed: clients are let in again.
    pub(super) fn resume(&self) {
        self.control.resume();
    }

    /// Leaves the socket's file to the new server.
    pub(super) fn give_up(self) {
        self.control.give_up();
    }
}
