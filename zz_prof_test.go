package tieredlimit
import ("testing";"os";"context";"github.com/tieredlimit/caddy-tieredlimit/replay";caddycmd "github.com/caddyserver/caddy/v2/cmd")
func TestZZProf(t *testing.T){
 cfg,_,_,err:=caddycmd.LoadConfig("/tmp/h8.caddyfile","")
 if err!=nil{t.Fatal(err)}
 _=os.Args
 for range 3 { if _,err:=replay.Run(context.Background(),replay.Options{Config:cfg,Wrap:newRehearsal,Logs:[]string{"/tmp/h8.small.log"},Quiet:true});err!=nil{t.Fatal(err)} }
}
